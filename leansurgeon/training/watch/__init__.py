"""What looks on while a model trains: progress, trackers, measures, memory, speed, and the guards that stop it."""
