"""From runs to rows: one row per arm of an experiment (its seeds together), per single run, or per untrained model."""
