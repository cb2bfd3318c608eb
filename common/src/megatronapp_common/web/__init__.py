"""Parts that every web server of the project shares."""
