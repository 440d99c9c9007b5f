"""What supervisor, agents and commands say to each other: frames, the server and the client."""
