"""What jobs did and would do: recordings, reports, advice, simulation, plots."""
