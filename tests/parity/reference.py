"""What transformers and torch make of a batch: the values that parity_tool must reproduce.

A batch is a list of documents (token, target), target -1 where nothing is learnt. Each document goes through the model
alone, so neither packing nor padding can hide a mistake on this side. loss = sum of nll / number of targets over all.
"""

from dataclasses import dataclass

import torch

torch.set_num_threads(1)  # models this small are slower on two, and ctest runs two of these suites side by side


@dataclass
class Document:
    token: torch.Tensor   # int64 [n]
    target: torch.Tensor  # int64 [n]: token[i + 1], or -1


def random_documents(vocab, lengths=(17, 1, 30, 9, 24, 12, 3, 21), seed=3):
    """Documents with prompts that are not trained, one of a single token and one in which nothing is trained."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for i, length in enumerate(lengths):
        token = torch.randint(vocab, (length,), generator=generator)
        token[length // 2] = 3  # the pad token of the model that has one
        target = torch.cat([token[1:], torch.tensor([-1])])
        target[: length // 4] = -1
        if i == 3:
            target[:] = -1
        documents.append(Document(token, target))
    return documents


def forward(model, documents):
    """(logits [tokens, V] fp32, loss)."""
    logits = torch.cat([model(input_ids=d.token[None]).logits[0] for d in documents]).float()
    target = torch.cat([d.target for d in documents])
    nll = torch.nn.functional.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
    return logits, nll / (target >= 0).sum()


def is_decayed(name):
    if name.endswith(("bias", "sinks", "router.scale", "router.per_expert_scale")) or "magnitude" in name or "ia3_l" in name:
        return False
    return not ("norm" in name or ".ln_" in name)


def train(model, documents, steps, lr, weight_decay, max_norm=None, eps=1e-8, optimizer=None):
    """Logits, loss and gradients of the first step, the losses, the gradients' norms, and the weights before and after `steps`
    steps of AdamW, or of what `optimizer` makes of groups of parameters. Low precision weights get fp32 masters, as everyone trains them."""
    model.train()  # no dropout in these models: the same function, but peft and transformers behave as in training
    names, live = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad])
    master = [p.detach().float().clone() for p in live]
    groups = [{"params": [m for n, m in zip(names, master) if is_decayed(n) == decay], "weight_decay": weight_decay * decay}
              for decay in (True, False)]
    optimizer = (optimizer or (lambda groups: torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=eps)))([g for g in groups if g["params"]])
    result = {"losses": [], "norms": [], "first_weights": {n: m.clone() for n, m in zip(names, master)}}
    for step in range(steps + 1):
        logits, loss = forward(model, documents)
        result["losses"].append(loss.item())
        if step == 0:
            result["logits"], result["loss"] = logits.detach(), loss.detach()
            target = torch.cat([d.target for d in documents])
            result["token_accuracy"] = (logits.argmax(-1) == target)[target >= 0].float().mean()
        if step == steps:
            break
        loss.backward()
        if step == 0:
            result["gradients"] = {n: p.grad.float().clone() for n, p in zip(names, live)}
        for p, m in zip(live, master):
            m.grad, p.grad = p.grad.float(), None
        result["norms"].append(torch.nn.utils.clip_grad_norm_(master, max_norm or float("inf")).item())
        optimizer.step()
        with torch.no_grad():
            for p, m in zip(live, master):
                p.copy_(m)
    result["weights"] = dict(zip(names, master))
    result["losses"] = torch.tensor(result["losses"])
    return result


def changes(after, before):
    return {name: value - before[name] for name, value in after.items()}


def relative(ours, reference):
    """Norm of the difference over the norm of the reference."""
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    difference, norm = (ours.double() - reference.double()).norm().item(), reference.double().norm().item()
    return difference / norm if norm else difference


def cosine(ours, reference):
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    return torch.nn.functional.cosine_similarity(ours.double().flatten(), reference.double().flatten(), dim=0).item()


def worst(ours, reference, measure):
    """The measure of every tensor of `reference`, worst first. Every name must be there, and no other."""
    assert set(ours) == set(reference), sorted(set(ours) ^ set(reference))
    values = [(measure(ours[name], reference[name]), name) for name in reference]
    return sorted(values, reverse=measure is relative)
