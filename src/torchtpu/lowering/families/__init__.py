"""One file per operator family; importing a family registers its operators."""
