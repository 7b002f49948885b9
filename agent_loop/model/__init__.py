"""Whatever samples: the contract, chat endpoints, token servers, and the recorder that keeps tokens exact."""
