"""One module per trainer that takes our rollouts; each imports its trainer when it is used."""
