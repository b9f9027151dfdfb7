"""Generation loops of published repositories, retold from their code without caches, batches or
processes, for comparison with ours."""
