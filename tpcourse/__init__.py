"""tpcourse: tensor parallelism, from one column-split matrix to 3D parallelism."""
