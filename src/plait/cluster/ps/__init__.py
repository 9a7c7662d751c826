"""The parameter server: variables and embedding rows on servers, with the optimizers' state beside them."""
