"""Image tasks: known data sets, the user's folders and tables, and images without labels."""
