// The first script: it begins the page of the cluster, or that of one task.

import { taskName } from "./place.js";

document.body.classList.toggle("task", taskName !== null);
import(taskName === null ? "./page.js" : "./task.js");
