"""How sensorium-mini is made: data by construction, training, evaluation, packing."""
