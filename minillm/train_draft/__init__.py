"""A small draft for a target model, made from nothing but the target's own text: `python -m minillm.train_draft`."""
