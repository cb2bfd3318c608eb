/** Recipes that this browser keeps, by name. */
import { readRecipe, type Recipe } from "./recipe";

const KEY = "megatronapp-scope-recipes";
export type SavedRecipes = Readonly<Record<string, Recipe>>;

/** An unreadable entry counts as none. */
export function loadRecipes(): SavedRecipes {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "{}") as Record<string, unknown>;
    return Object.fromEntries(
      Object.entries(found).map(([name, recipe]) => [name, readRecipe(JSON.stringify(recipe))]),
    );
  } catch {
    return {};
  }
}

/** Throws DOMException where the browser stores nothing. */
export const storeRecipes = (recipes: SavedRecipes): void =>
  localStorage.setItem(KEY, JSON.stringify(recipes));
