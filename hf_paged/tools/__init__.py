"""Tools around generation: commands; text, HTML and plots of the memory and of requests; the
timeline of an engine; loading and inspection of models; metrics; and `transformers serve` on the
engine, which imports the optional packages `native` and `grammar`."""

from .loading import load_model as load_model
from .loading import load_tokenizer as load_tokenizer
from .pictures import cache_html as cache_html
from .pictures import engine_html as engine_html
from .pictures import plot_cache as plot_cache
from .pictures import plot_engine as plot_engine
from .pictures import plot_intervals as plot_intervals
from .pictures import stats_html as stats_html
from .pictures import stats_text as stats_text
from .timeline import Timeline as Timeline
