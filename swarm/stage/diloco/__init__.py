"""DiLoCo: peers step by themselves, and a round averages what they learnt."""
