"""Its wheels ask for a newer glibc than there may be; Megatron-Bridge imports one name of it."""
