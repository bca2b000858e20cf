"""Greedy outputs of the default model, token by token, measured with transformers in float32."""

GOLDENS = {
    "The letters run ABC": [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127],
    "1, 2, 3, 4, 5,": [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28],
    "My favourite colour is": [4461, 30, 2],
    "😊 😊 😊 😊 😊": [198, 198, 10813, 235, 119, 10813, 235, 119],
    "Reply with only this emoji: 😊\nReply: 😊\nReply with only this emoji: 🌶\nReply:": [
        15107,
        230,
        131,
        198,
        9302,
        318,
    ],
}
