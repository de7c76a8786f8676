"""Perseus: cut the energy of large-model training without slowing it down."""
