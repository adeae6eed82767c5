"""The flags of `vllm serve`, on the command line of Sensorium's servers."""
