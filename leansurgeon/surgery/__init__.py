"""Surgery: more heads, fewer layers, other MLPs, and the proof of what was kept.

Three values follow each other: what a user wants (`plan.wanted`, and `plan.method` for how), the plan (`plan.planning`,
priced by `plan.costs`; it reads no weights and carries the result as `checkpoints.reshaped.Reshaped`), and what sample
data has decided (`shrink.decide`), which `shrink.carry_out` writes and proves.

    plan/    what is wanted; `operators` says what each promises, and in which order they go
    layer/   mathematics of one layer: `canonical` (one form for every layout), splitting, trimming, balancing
    refit/   least squares and local fits of filled blocks; `block` holds the handles
    walk/    with sample data: `ground` (plan, teacher, samples), `student` (one candidate),
             `choose_layers`, `score`, `budget` and `projection`; `calibrated` lets candidates compete, block by block
    write/   `transfer` streams tensors to the output by index maps, which `undo` reads backwards
    check/   `doctor` puts a family's declaration to the test; `judged` holds a result against its source
    prune    heads by measured importance

Each floor imports only those that stand below it: check, shrink and prune, walk, write, plan, layer, refit.
Importing the planning half costs no torch.
"""
