"""One training step, from its rollouts to new weights in vLLM. Read this first; docs/architecture.md has the rest."""

# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false
from typing import Any

from agentlightning.verl.trainer import _grpo_group_metrics
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.utils.metric import reduce_metrics
from verl.utils.profiler.performance import marked_timer

from empo2.recipe import baselines
from empo2.recipe.trainer.advantages import rollout_advantages, worth_imitating
from empo2.recipe.trainer.passes import old_log_probs, reference_log_probs, rows_with_kl, update_policy
from empo2.recipe.trainer.play import PlayingTrainer
from empo2.recipe.trainer.replay import joined
from empo2.recipe.trainer.rows import add_by_turn, distill, set_advantages, update_results
from empo2.recipe.trainer.tracking import entropies, name_sums, row_metrics, say_step
from empo2.recipe.trainer.updates import planned_batch, what_was_masked


def train_step(
    trainer: PlayingTrainer, timing: dict[str, float], *, profile: bool = False
) -> tuple[dict[str, Any], DataProto]:
    """Play, make rows, update the policy, push it to vLLM; return the step's metrics and its rows.

    A row is a chat of a rollout: prompt and replies as token ids, [rows, tokens]. No row is dropped to fill a
    mini-batch; those without a gradient cost no pass.

    Raises:
        NoUsableRollouts: several batches of tasks were played, and nothing can be trained on.
    """
    algorithm, actor = trainer.settings.algorithm, trainer.config.actor_rollout_ref.actor

    # Play. Each group's mode is drawn; the gateway shows tips, records calls, and asks for new tips.
    with marked_timer("gen", timing):
        rollouts, metrics = trainer.play_until_usable(profile=profile)
        results = trainer.manager.results  # of all, with those that cannot be trained on
        taught = worth_imitating(results.kept, algorithm) if algorithm.distills else set[str]()
        if algorithm.holds_untaught:
            rollouts = results.hold_untaught(rollouts, taught)
        batch, of_rows = trainer.rows_of(rollouts)

    # Rows and advantages. A rollout's advantage, relative to its group, is that of each of its tokens.
    advantages = rollout_advantages(results.kept, algorithm)
    if algorithm.distills:
        advantages |= {rollout: 0.0 for rollout, result in results.kept.items() if result.mode.off_policy}
    set_advantages(batch, results.kept, advantages)
    paper = baselines.asked_for(trainer.settings, "algorithm.advantage")
    if paper:
        of_turns, of_paper = paper.turn_advantages(results, algorithm)
        add_by_turn(batch, results, of_turns)
        metrics |= of_paper
    replayed = trainer.replay.drawn(trainer.global_steps)
    if algorithm.distills and (replayed or any(each.mode.off_policy for each in results.kept.values())):
        metrics |= distill(batch, taught, results, imitate=algorithm.off_policy_loss == "imitation")
    trainer.records.note_rollouts(trainer.manager, trainer.global_steps, "training", advantages)
    metrics |= of_rows | row_metrics(batch, of_rows, results.kept, algorithm)
    say_step(trainer.global_steps, metrics, results.kept, algorithm, paper)
    trainer.checkpoint_manager.sleep_replicas()  # vLLM makes room

    # Replay. Until the update is done, rows of earlier steps' successes follow the step's own.
    own = len(batch)
    if algorithm.replayed_tasks:
        trainer.replay.store(batch, results.kept)
        batch = joined(batch, replayed)
        metrics["empo2/replayed_rows"] = len(batch) - own

    # Old log-probs. They are vLLM's, of the prompts as sent: those of off-policy rows were taken with their tips.
    with marked_timer("old_log_prob", timing):
        batch.batch["old_log_probs"], metrics["perf/mfu/actor_infer"] = old_log_probs(trainer, batch, algorithm)

    # Reference. The first weights' log-probs, of the rows that the KL term holds to them.
    held = rows_with_kl(batch, algorithm) & trainer.use_reference_policy
    if trainer.use_reference_policy:
        with marked_timer("ref", timing):
            batch.batch["ref_log_prob"] = reference_log_probs(trainer, batch, held)

    # Plan. Whole groups are dealt to the optimizer steps, rows to the GPUs; each rollout weighs the same.
    planned, size = planned_batch(
        batch,
        updates=algorithm.updates_per_step,
        ranks=trainer.resource_pool_manager.get_n_gpus(),
        micro_batch=actor.ppo_micro_batch_size_per_gpu or 1,
        other_terms=held | (actor.entropy_coeff != 0),
        frozen=algorithm.learning_rate == 0,
    )

    # Update. The loss is `hybrid_loss`, which says what tokens it masked.
    with marked_timer("update_actor", timing):
        sums = update_policy(trainer, planned, size)
    masked, updated = what_was_masked(batch, planned, sums.pop("actor/masked_at"))
    batch, masked, updated = batch.slice(0, own), masked[:own], updated[:own]
    trainer.gateway.updated(trainer.global_steps, update_results(batch, results, masked, updated))
    trainer.records.note_update(trainer.global_steps, batch, results.kept, masked, updated)

    # Push.
    with marked_timer("update_weights", timing):
        trainer.checkpoint_manager.update_weights(trainer.global_steps)

    # Metrics. verl's own ask for rewards and returns by token.
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch.batch["returns"] = batch.batch["advantages"]
    metrics |= _grpo_group_metrics(batch) | compute_data_metrics(batch, use_critic=False)
    metrics |= reduce_metrics(name_sums(sums, actor.ppo_epochs)) | entropies(batch)
    metrics["empo2/updates"] = len(planned) // size * actor.ppo_epochs
    return metrics, batch
