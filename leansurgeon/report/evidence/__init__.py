"""What a report rests on: folders of runs and models, read once into typed values. Odd values become gaps."""
