"""What lays a model over ranks: meshes, tensor, pipeline and data parallelism, recomputation,
initial weights."""
