"""Rules of single subjects, which `config.checks` applies."""
