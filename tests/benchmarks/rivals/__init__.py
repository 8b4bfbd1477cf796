"""Rivals of the calibrated cut, each rebuilt from its paper's description, on one model, the same tokens and one judge.

python -m tests.benchmarks.rivals MODEL --layers 24 --calibrate brown.txt --calibrate austen.txt --judge bible.txt \
    --seeds 0,1,2 --out rivals.jsonl
"""
