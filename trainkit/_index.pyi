import numpy as np
from numpy.typing import NDArray

csrc_sha256: str

def permute(n: int, key: int, start: int, out: NDArray[np.int64]) -> None: ...
