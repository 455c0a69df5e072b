"""Host frameworks, one package each, imported only when asked for."""
