"""How sensorium-mini is made: data by construction, training, evaluation, packing."""

import os

# Many processes make the data, each with one thread: more would only wait for each other.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
