"""Power budgets over jobs: each job's operating points, and which job slows down by how much. Pure."""
