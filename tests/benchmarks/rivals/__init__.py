"""Rivals of the calibrated cut, each rebuilt from its paper's description, on one model, the same tokens and one judge.

python -m tests.benchmarks.rivals --model MODEL --layers 27,24,20 --calibrate brown.txt --calibrate austen.txt \
    --judge bible.txt --seed 0,1,2 --state rivals.jsonl
python -m tests.benchmarks.rivals --table rivals.jsonl
"""
