"""Who writes what when several processes save the state of a model of this size together."""
