"""One file a chapter, `chapter_NN.py`, each with a list named EXERCISES. Found by name; nothing to register."""
