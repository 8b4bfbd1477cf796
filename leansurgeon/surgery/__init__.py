"""Surgery: add heads, drop layers, resize MLPs, and prove what was kept.

    plan           `requested_shape` and `method` (what the user asks for), `planning` (from a shape to operators; reads
                   no weights), `operators`, `drop_layers`, `class_attention`, `costs`, `next_steps`
    execution      `shrink` (the whole sequence), `transfer` (writes tensors by index maps), `undo` (applies the maps in
                   reverse), `prune` (heads by measured importance)
    calibration    `calibrate` (the whole sequence), `context`, `candidates`, `candidate_model`, `choose_layers`,
                   `score`, `spans`, `resume`
    one layer      `canonical` (one form for every layout), `split_heads`, `split_factors`, `trim_units`, `balance`;
                   `ridge`, `refit_block` and `local_fit` repair it, `probes` holds the hooks
    checks         `doctor` and `roles` test the declaration of a family, `family_check`, `undeclared` and
                   `undeclared_timm` test every type of a library; `judged` compares a result with its source

Importing the plan does not import torch.
"""
