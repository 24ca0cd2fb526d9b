"""nbgrader's view of this repository: `nbgrader generate_assignment 01_ranks_and_collectives` and the steps after it."""

c = get_config()  # noqa: F821  nbgrader provides it
c.CourseDirectory.course_id = "tpcourse"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "exercises"
c.ClearSolutions.code_stub = {"python": "# Your code here\n..."}
