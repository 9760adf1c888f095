"""Collective GEMMs at work: the steps of `plait.schedule`, executed over one transport or another."""
