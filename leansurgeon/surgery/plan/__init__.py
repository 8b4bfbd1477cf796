"""What is wanted, by which operators it is reached, how exact each of them is and what it costs; nothing is done."""
