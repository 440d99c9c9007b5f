"""Tasks about hosts: nodes, doctor, setup, fleet."""
