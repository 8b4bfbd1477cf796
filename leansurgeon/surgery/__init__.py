"""Surgery: more heads, fewer layers, other MLPs, and the proof of what was kept.

Three values follow each other: what a user wants (`wanted`, and `method` for how), the plan (`plan`, shown by `table`,
priced by `costs`; it reads no weights), and the result (`shrink` decides what the plan leaves open, has it applied, and
proves it).

    operators     one kind of change each; `operator` says what each promises: `heads`, `split_heads`, `drop_layers`,
                  `fuse_layers`, `mlp`, `trim_units`, `prune`, `balance`, `fresh`, `class_attention`
    without data  `apply` streams tensors from the source to the output; `uncalibrated` splits heads by weights alone
    with data     `calibrated` walks teacher and `student` side by side, block by block: `choose_layers`, `candidates`,
                  `make_layer`, `make_fused`, and `heal` with `heal_block` and `local_fit`
    beside them   `canonical` (one form for every layout), `block` (handles on a built block)
    afterwards    `undo`, `diff`, `compare`, and `doctor`, which puts a family's declaration to the test

Importing the planning half (`wanted`, `method`, `plan`, `table`) costs no torch.
"""
