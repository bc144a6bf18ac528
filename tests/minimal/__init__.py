"""Files here have names that files of other folders have too: as a package they are told apart."""
