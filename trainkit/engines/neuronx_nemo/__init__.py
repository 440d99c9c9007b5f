"""engine = "neuronx-nemo": neuronx-nemo-megatron on Trainium."""
