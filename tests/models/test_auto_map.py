"""What the files that travel say of their classes is true of every family that has one."""

import importlib

import pytest

from leansurgeon import architectures
from leansurgeon.checkpoints.family import auto_map

FAMILIES = [name for name, family in architectures.load_families().items() if family.library == "leansurgeon"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_map_of_a_family_names_its_own_classes(name):
    family = architectures.load_families()[name]
    own = family.modelling.removesuffix(".py")
    module = importlib.import_module(f"leansurgeon.models.{own}")
    classes = {}
    for auto, full in auto_map(family.modelling, family.model_types[0]).items():
        stem, _, cls = full.partition(".")
        assert stem == own
        classes[auto] = getattr(module, cls)
    config = classes.pop("AutoConfig")
    assert (config.model_type,) == family.model_types
    assert classes and all(cls.config_class is config for cls in classes.values())
    assert set(family.classes.values()) <= {cls.__name__ for cls in classes.values()}
