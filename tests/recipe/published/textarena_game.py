"""TextArena's README, with a game for one."""

import sys

import textarena as ta

agents = {0: ta.agents.OpenRouterAgent(model_name="gpt-4o-mini")}
env = ta.make(env_id="GuessTheNumber-v0")
env.reset(num_players=len(agents), seed=int(sys.argv[1]))
done = False
while not done:
    player_id, observation = env.get_observation()
    action = agents[player_id](observation)
    done, step_info = env.step(action=action)
rewards, game_info = env.close()
print(rewards[0])
