"""Which rows two parties have in common, found out without showing each other the rest."""
