"""The report as one HTML page: Jinja templates over typed blocks. Everything that a template prints is escaped."""
