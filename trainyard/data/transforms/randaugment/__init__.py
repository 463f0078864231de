"""RandAugment on whole batches; `policy` reads the notation, without torch."""
