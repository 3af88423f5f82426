"""The Update Framework (TUF) on the controller: the metadata repository, signing keys and signers, and key changes. May
import `errors` and `edgesplit`."""
