"""Training of DFlash drafters: data, objective, trainer, export. The feature source is a port."""
