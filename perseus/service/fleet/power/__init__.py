"""Power budgets over jobs: what each job can offer, who slows down by how much. Pure."""
