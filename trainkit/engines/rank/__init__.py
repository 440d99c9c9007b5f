"""The program beside each rank of a foreign engine. It runs in the engine's own image: standard
library only, Python 3.8 and newer."""
