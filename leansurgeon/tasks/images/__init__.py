"""Tasks on images: known sets, folders and tables of one's own, and pictures without labels."""
