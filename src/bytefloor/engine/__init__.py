"""When it is computed: requests, the scheduler, the cache, the executors, the sampler and the loop."""
