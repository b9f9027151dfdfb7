"""Generation loops of published repositories and algorithms of papers, retold from their text
without caches, batches or processes, for comparison with ours."""
